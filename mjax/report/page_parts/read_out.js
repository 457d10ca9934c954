// Writes the values of all curves at the step under the pointer into the chart's heading.
const heading = document.getElementById(`values-${field}`)
if (heading == null) return
const step = cb_data.geometry.x
const shown = value => Math.abs(value) >= 9999.5
  ? value.toLocaleString("en", {maximumFractionDigits: 0}) : `${Number(value.toPrecision(4))}`
const parts = sources.map((source, i) => {
  const steps = source.data.step
  let at = steps.findIndex(one => one >= step)
  if (at < 0) at = steps.length - 1
  if (at > 0 && step - steps[at - 1] < steps[at] - step) at -= 1
  const value = (source.data.mean ?? source.data.value)[at]
  const part = document.createElement("span")
  part.style.borderColor = colors[i]
  part.style.borderBottomStyle = dashes[i]
  const is_known = Number.isFinite(value) && step >= steps[0] - 1 && step <= steps.at(-1) + 1
  part.textContent = is_known ? shown(value) : "\u2013"
  part.title = names[i]
  return [steps[at], part]
})
const nearest = parts.map(([at]) => at).sort((a, b) => Math.abs(a - step) - Math.abs(b - step))[0]
const label = document.createElement("span")
label.textContent = `step ${nearest.toLocaleString("en")}`
heading.replaceChildren(label, ...parts.map(([, part]) => part))
