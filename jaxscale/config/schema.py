"""The configuration: frozen, typed, one field a line, each with its unit.

A field whose change alters the mathematics of a run belongs here; whether a change is allowed when a run
continues is decided in `jaxscale.config.compare`.
"""

from collections.abc import Mapping
from dataclasses import field
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator
from pydantic.dataclasses import dataclass

from jaxscale.config.experts import MoeConfig
from jaxscale.config.fields import STRICT, Count, Positive, refuse_bool
from jaxscale.config.memory import OffloadConfig, RematConfig, expand_remat
from jaxscale.config.optimizers import OptimizerConfig


def _expand_axes(value: Any) -> Any:
    """`tensor` is short for [tensor], and `replicated` says by name that a dim lies over no axis."""
    if isinstance(value, str):
        return () if value == "replicated" else (value,)
    if not value and value is not None:
        raise ValueError("an empty list of axes; a dim that lies over no axis is `replicated`, by that name")
    return value


def _tag_model(value: Any) -> str:
    """Which kind of model section this is: one from a Python file, or a decoder."""
    if value is None:
        return "none"
    has_file = "file" in value if isinstance(value, Mapping) else isinstance(value, PythonModelConfig)
    return "file" if has_file else "decoder"


def _expand_precision(value: Any) -> Any:
    """`precision: bf16` is short for bf16 compute over fp32 parameters, accumulators and moments."""
    return {"compute": value} if isinstance(value, str) else value


def _refuse_narrow(value: Any) -> Any:
    if value in ("fp16", "fp8"):
        raise ValueError(
            f"{value} is for compute only: sums and updates kept in it are lost; use fp32 or bf16"
        )
    return value


AxisSize = Annotated[int, BeforeValidator(refuse_bool), Field(ge=-1)]
ComputeFormat = Literal["fp32", "bf16", "fp16", "fp8"]
StateFormat = Annotated[Literal["fp32", "bf16"], BeforeValidator(_refuse_narrow)]
StrategyAxes = Annotated[tuple[str, ...], BeforeValidator(_expand_axes)]


@dataclass(frozen=True, config=STRICT, kw_only=True)
class MeshConfig:
    """Devices along each mesh axis, slowest wire first; at most one may be -1 (all that is left)."""

    pipe: AxisSize = 1
    """Devices along `pipe`: pipeline stages."""
    data: AxisSize = 1
    """Devices along `data`: replicas of the model, gradients reduced once a step."""
    fsdp: AxisSize = 1
    """Devices along `fsdp`: parameters, gradients and optimizer state are laid over it by the ZeRO stage."""
    expert: AxisSize = 1
    """Devices along `expert`: expert shards; for a dense model, more replicas of it."""
    tensor: AxisSize = 1
    """Devices along `tensor`: heads, MLP channels and vocabulary are laid over it."""


@dataclass(frozen=True, config=STRICT, kw_only=True)
class ZeroConfig:
    """ZeRO stage (Rajbhandari 2020): what is laid over the ZeRO axes (`jaxscale.sharding.zero`)."""

    stage: Annotated[Literal[0, 1, 2, 3], BeforeValidator(refuse_bool)] = 3
    """0 nothing, 1 optimizer state, 2 and gradient accumulators, 3 and the weights in use."""
    keep_gathered: bool = False
    """Stage 3: gather the weights once a step and keep them, instead of once a layer and pass."""


@dataclass(frozen=True, config=STRICT, kw_only=True)
class BatchConfig:
    """The batch of one optimizer update."""

    sequences: Positive
    """Sequences a step, over the whole mesh."""
    microbatches: Positive = 1
    """Microbatches a step: gradients are accumulated over them, the mathematics stays."""
    length: Positive
    """Tokens a sequence."""


@dataclass(frozen=True, config=STRICT, kw_only=True)
class ModelConfig:
    """The shape of a decoder."""

    family: Literal["llama", "gpt2"]
    """llama: RMSNorm, rotary positions, SwiGLU. gpt2: LayerNorm, learned positions, GELU, biases."""
    layers: Positive
    """Decoder blocks."""
    embed: Positive
    """Channels of the residual stream."""
    heads: Positive
    """Query heads."""
    kv_heads: Positive | None = None
    """Key and value heads (grouped-query attention); null: as many as query heads."""
    head: Positive | None = None
    """Channels of a head; null: embed / heads."""
    mlp: Positive
    """Hidden channels of the MLP."""
    tied: bool = False
    """Whether the output head is the embedding, transposed."""
    vocab: Positive | None = None
    """Tokens in the vocabulary; null: as many as the tokenizer has."""
    positions: Positive | None = None
    """Longest sequence in tokens; gpt2 learns so many positions. null: batch.length."""
    rope_theta: Annotated[float, BeforeValidator(refuse_bool), Field(gt=0)] = 10_000.0
    """Base of the rotary frequencies, no unit."""
    rope_scaling: Literal["none", "llama3.1"] = "none"
    """llama3.1: stretch low rotary frequencies 8 times, as published for an 8,192-token pre-training."""
    norm_eps: Annotated[float, BeforeValidator(refuse_bool), Field(gt=0)] = 1e-5
    """Added to the variance in a norm, no unit."""
    attention: Literal["auto", "xla", "splash", "cudnn"] = "auto"
    """Kernel, the same numbers up to rounding; auto: splash on TPU, cuDNN on GPU in bf16, XLA elsewhere."""


@dataclass(frozen=True, config=STRICT, kw_only=True)
class PythonModelConfig:
    """A model of your own, from a Python file."""

    file: Annotated[str, Field(min_length=1)]
    """Path of the Python file, relative to the working directory."""
    factory: str = "make_model"
    """Function in it: (vocab=..., length=..., **arguments) -> `jaxscale.Model`."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """Passed on to the factory by name."""
    vocab: Positive | None = None
    """Tokens in the vocabulary; null: as many as the tokenizer has."""


SourceName = Literal["python-stdlib", "text", "jsonl", "parquet", "tokens"]


@dataclass(frozen=True, config=STRICT, kw_only=True)
class MixtureConfig:
    """One source of a mixture."""

    source: SourceName
    """Kind of source, as data.source."""
    paths: tuple[str, ...] = ()
    """Files or glob patterns."""
    field: str = "text"
    """Field (JSONL) or column (Parquet) that holds the text."""
    weight: Annotated[float, BeforeValidator(refuse_bool), Field(gt=0)]
    """Share of the sequences drawn from this source, relative to the other weights."""


@dataclass(frozen=True, config=STRICT, kw_only=True)
class DataConfig:
    """Where text comes from and how it becomes windows of tokens."""

    source: SourceName = "python-stdlib"
    """python-stdlib: the source text of the running Python's standard library; the others read `paths`."""
    paths: tuple[str, ...] = ()
    """Files or glob patterns, relative to the working directory."""
    field: str = "text"
    """Field (JSONL) or column (Parquet) that holds the text."""
    mixture: tuple[MixtureConfig, ...] = ()
    """Several sources with weights, in place of source, paths and field."""
    tokenizer: str = "bytes"
    """bytes; the path of a Hugging Face tokenizer.json; train:N, a byte-level BPE of N tokens made from the
    corpus; or none, for token ids whose tokenizer is not at hand."""
    end_token: str | None = None
    """Token that ends a document (an id for tokenizer none); null: found by its usual names."""
    validation_fraction: Annotated[float, BeforeValidator(refuse_bool), Field(ge=0, lt=1)] = 0.05
    """Fraction of each source's tokens held out for validation."""
    cross_documents: bool = False
    """Whether attention may cross a document boundary within a window."""
    restart_positions: bool = True
    """Whether positions restart at a document boundary."""
    cache_dir: str | None = None
    """Folder for tokenised corpora; null: jaxscale in the user's cache folder."""


@dataclass(frozen=True, config=STRICT, kw_only=True)
class PrecisionConfig:
    """Number formats. `precision: bf16` is short for {compute: bf16}."""

    compute: ComputeFormat = "fp32"
    """Matmuls and activations; norm statistics, rotary angles, softmax and loss stay fp32. fp16: with
    dynamic loss scaling. fp8: the blocks' matmuls alone, all else in bf16."""
    params: StateFormat = "fp32"
    """Parameters as the optimizer keeps them."""
    accumulate: StateFormat = "fp32"
    """Gradient accumulators; the reduction over `data` is fp32 whatever they are."""
    moments: StateFormat = "fp32"
    """Moments of the optimizer, first and second; bf16 ones are rounded stochastically."""


@dataclass(frozen=True, config=STRICT, kw_only=True)
class LossScaleConfig:
    """Dynamic loss scaling of fp16 compute (Micikevicius 2018), between 1 and 2^24; an overflow halves it."""

    initial: Annotated[float, BeforeValidator(refuse_bool), Field(ge=1, le=2**24)] = 65536.0
    """Factor of the loss at the first step, no unit."""
    growth_steps: Positive = 2000
    """Applied updates in a row after which the factor doubles."""


@dataclass(frozen=True, config=STRICT, kw_only=True)
class Fp8Config:
    """How numbers are scaled into fp8."""

    scaling: Literal["delayed", "dynamic"] = "delayed"
    """delayed: by the largest magnitudes of the last steps. dynamic: by those of the tensor at hand."""
    history: Positive = 1024
    """Steps that a delayed scale looks back on."""
    margin: Annotated[int, BeforeValidator(refuse_bool), Field(ge=0, le=15)] = 0
    """Powers of two that a delayed scale leaves free above the largest magnitude, no unit."""


@dataclass(frozen=True, config=STRICT, kw_only=True)
class CheckpointConfig:
    """When the run is saved; the last step always is."""

    every_steps: Count = 100
    """Steps between checkpoints; 0: only at the end."""
    keep: Positive = 3
    """Newest checkpoints kept."""


@dataclass(frozen=True, config=STRICT, kw_only=True)
class EvalConfig:
    """Validation during training."""

    every_steps: Count = 0
    """Steps between evaluations; 0: never."""
    sequences: Positive = 64
    """Validation sequences an evaluation, the same ones each time."""


@dataclass(frozen=True, config=STRICT, kw_only=True)
class NonfiniteConfig:
    """What happens to a step whose loss or gradients are not finite: it changes nothing, and is counted."""

    policy: Literal["skip", "stop"] = "skip"
    """skip: go on with the next batch, up to the limit. stop: end the run at the first, with exit code 3."""
    limit: Positive = 20
    """Skipped steps in a row that a run survives; one more ends it with exit code 3."""


@dataclass(frozen=True, config=STRICT, kw_only=True)
class Config:
    """A whole run."""

    run_dir: Annotated[str, Field(min_length=1)]
    """Folder of the run: resolved config, metrics, checkpoints."""
    seed: Annotated[int, BeforeValidator(refuse_bool), Field(ge=0, lt=2**32)] = 0
    """Seed of the initial weights and of the order of the data."""
    steps: Positive
    """Optimizer updates in the run, skipped ones included."""
    stop_after_steps: Positive | None = None
    """End early after so many steps as if stopped on request: everything saved, exit code 75."""
    mesh: MeshConfig = field(default_factory=MeshConfig)
    zero: ZeroConfig = field(default_factory=ZeroConfig)
    strategy: dict[str, StrategyAxes] = field(default_factory=dict)
    """Dim name -> mesh axes in order (`tensor`, `[fsdp, expert]`, `replicated`), over the usual strategy."""
    batch: BatchConfig
    model: Annotated[
        Annotated[ModelConfig, Tag("decoder")]
        | Annotated[PythonModelConfig, Tag("file")]
        | Annotated[None, Tag("none")],
        Discriminator(_tag_model),
    ]
    """A decoder by its shape, or a model of your own by its Python file; null: it comes from Python."""
    moe: MoeConfig | None = None
    """Experts in place of a decoder's MLP; null: a dense model."""
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    precision: Annotated[PrecisionConfig, BeforeValidator(_expand_precision)] = field(
        default_factory=PrecisionConfig
    )
    loss_scale: LossScaleConfig | None = None
    """With fp16 compute alone, where null is the published constants."""
    fp8: Fp8Config | None = None
    """With fp8 compute alone, where null is the defaults."""
    remat: Annotated[RematConfig, BeforeValidator(expand_remat)] = field(default_factory=RematConfig)
    offload: OffloadConfig = field(default_factory=OffloadConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    nonfinite: NonfiniteConfig = field(default_factory=NonfiniteConfig)

    @model_validator(mode="after")
    def _resolve_formats(self) -> Self:
        """Sections that one compute format reads: its defaults with that format, an error with any other."""
        compute = self.precision.compute
        for name, of, section in (("loss_scale", "fp16", LossScaleConfig), ("fp8", "fp8", Fp8Config)):
            given = getattr(self, name)
            if compute == of and given is None:
                object.__setattr__(self, name, section())
            elif compute != of and given is not None:
                raise ValueError(
                    f"{name} is for {of} compute and precision.compute is {compute}: remove the section, or "
                    f"set precision.compute to {of}"
                )
        return self
