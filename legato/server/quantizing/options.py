"""The options of `text-generation-server quantize`. Brings in no torch: wrong flags end before it is imported."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from legato.common.option import option
from legato.common.options import LogOptions, ModelOptions


@dataclass(frozen=True, kw_only=True)
class QuantizeOptions(ModelOptions, LogOptions):
    """Quantization"""

    changes: ClassVar[dict[str, dict[str, Any]]] = {"model_id": {"positional": True}}

    output_dir: str | None = option(None, "Folder for the quantized model.", env=None, positional=True)
    calibration: str | None = option(
        None, "Text file for calibration, which resembles the model's later inputs. Required.", env=None
    )
    bits: Literal["2", "3", "4", "8"] = option("4", "Bits per weight.", env=None)
    group_size: int = option(
        128, "Number of inputs that share a scale; `-1` means all of them.", alias="groupsize", env=None, minimum=-1
    )
    act_order: bool = option(
        False, "Group inputs by the size of their activations. Makes matrix products slower.", env=None
    )
    sym: bool = option(
        False,
        "Symmetric ranges, without zero points: lower quality, but some kernels of other servers need them.",
        env=None,
    )
    percdamp: float = option(
        0.03,
        "Damping: fraction of the mean of the Hessian's diagonal that is added to the diagonal.",
        env=None,
        minimum=0,
    )
    calibration_samples: int = option(128, "Number of calibration sequences.", env=None, minimum=1)
    calibration_length: int = option(512, "Tokens per calibration sequence.", env=None, minimum=16)
    device: Literal["auto", "cpu", "cuda"] = option(
        "auto", "Device to quantize on. `auto` uses a GPU if one is available.", env=None
    )
