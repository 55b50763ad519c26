"""The folder of a run: resolved configuration, tokenizer, metrics, checkpoints."""

from dataclasses import dataclass
from pathlib import Path

from jaxscale.config import Config, UserError, check_same_mathematics, dump_config, load_config
from jaxscale.data.dataset import Data, open_data
from jaxscale.disk import write_whole


@dataclass(frozen=True)
class RunDir:
    """Names of what a run directory holds."""

    path: Path

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def tokenizer(self) -> Path:
        return self.path / "tokenizer"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def expert_load(self) -> Path:
        """One line at each evaluation, each checkpoint and the last step; for a model with experts alone."""
        return self.path / "expert_load.jsonl"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"


def check_run_dir(config: Config) -> RunDir:
    """Refuses a run directory that cannot be used for this configuration; changes nothing on disk.

    Raises:
      UserError: the path is a file, holds other things, or holds a run with other mathematics.
    """
    run_dir = RunDir(Path(config.run_dir))
    if run_dir.path.exists() and not run_dir.path.is_dir():
        raise UserError(f"run_dir={config.run_dir} is a file; name a folder")
    if run_dir.config.exists():
        check_same_mathematics(load_config(run_dir.config), config)
    elif run_dir.path.is_dir() and any(run_dir.path.iterdir()):
        raise UserError(
            f"run_dir={config.run_dir} holds files but no run (no config.yaml); name a new or empty folder"
        )
    return run_dir


def write_config(run_dir: RunDir, config: Config) -> None:
    """Writes the resolved configuration, whole or not at all."""
    try:
        run_dir.path.mkdir(parents=True, exist_ok=True)
        text = "# Resolved by jaxscale: every field of this run.\n" + dump_config(config)
        write_whole(run_dir.config, text)
    except OSError as error:
        raise UserError(
            f"run_dir={config.run_dir} cannot be written: {error.strerror}; name a folder of your own"
        ) from None


def open_run(path: str | Path) -> tuple[RunDir, Config]:
    """The run in a folder, for commands that read one.

    Raises:
      UserError: there is no run in it.
    """
    run_dir = RunDir(Path(path))
    if not run_dir.config.exists():
        raise UserError(f"{path}: no run here (no config.yaml); name the run_dir of `jaxscale train`")
    return run_dir, load_config(run_dir.config)


def open_run_data(config: Config, run_dir: RunDir) -> Data:
    """The run's text, with the tokenizer that its folder keeps once the run has begun.

    Raises:
      UserError: files, text, tokenizer or vocabulary that the user can mend.
    """
    return open_data(
        config.data,
        length=config.batch.length,
        seed=config.seed,
        vocab=config.model.vocab if config.model else None,
        tokenizer_dir=run_dir.tokenizer,
        sequences=config.batch.sequences,
    )
