"""The keys of group `log`: what a run says, and where to."""

from pydantic import Field

from mjax.config.schema.base import Group


class LogConfig(Group):
    """Sinks; JSON lines and the console are always on."""

    interval: int = Field(10, ge=1)
    diagnostics_interval: int | None = Field(None, ge=1)
    """Steps between records of the norms of each layer and of the gradient noise; each costs up to
    three steps (docs/train/debugging.md).
    """
    tensorboard: bool = False
    wandb_project: str | None = None
    mlflow_experiment: str | None = None
    """Experiment on the server of MLFLOW_TRACKING_URI, else run.dir/mlruns."""
    trackio_project: str | None = None
    """Project of trackio, on this machine."""
    opentelemetry: bool = False
    """Send spans of steps, data, saves and evaluations to OTEL_EXPORTER_OTLP_ENDPOINT."""
    device_check_interval: int | None = Field(None, ge=1)
    """Steps between timings of one small matmul on every device, which name a slow one
    (docs/train/monitoring.md).
    """
    peak_tflops: float | None = Field(None, gt=0)
    """For MFU; None: known chips."""
    profile_steps: list[int] | None = None
    """[first, last] step of a trace in run.dir/profile."""
