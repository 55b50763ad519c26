"""What a run reports, and where: records, sinks, the console, model FLOPs. Knows no model."""

from jaxscale.metrics.console import Console, LiveConsole, PlainConsole, SilentConsole, open_console
from jaxscale.metrics.flops import (
    has_fp8,
    model_flops_per_token,
    model_flops_utilisation,
    peak_flops_per_second,
)
from jaxscale.metrics.records import OPTIONAL_FIGURES, EvalRecord, LoadRecord, StepRecord
from jaxscale.metrics.sinks import JsonlSink, Sink, Sinks, TensorBoardSink

__all__ = [
    "OPTIONAL_FIGURES",
    "Console",
    "EvalRecord",
    "JsonlSink",
    "LiveConsole",
    "LoadRecord",
    "PlainConsole",
    "SilentConsole",
    "Sink",
    "Sinks",
    "StepRecord",
    "TensorBoardSink",
    "has_fp8",
    "model_flops_per_token",
    "model_flops_utilisation",
    "open_console",
    "peak_flops_per_second",
]
