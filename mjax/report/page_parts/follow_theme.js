// Bokeh's canvases keep the colors that they were painted in. A print does not wait, and is light.
// Chromium prints a layer that was only cleared as white over the others, so one is painted.
const repaint = () => Bokeh.index.roots.forEach(view => { // one is no figure
  view.request_paint?.(view.model.renderers[0]) // and with it all of its layer
  view.repaint?.()
})
const show = theme => () => { document.documentElement.dataset.theme = theme; repaint() }
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", repaint)
addEventListener("beforeprint", show("light"))
addEventListener("afterprint", show("browser"))
