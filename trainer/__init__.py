"""Train embedding networks: data sets, networks, losses, the loop, checkpoints.

from trainer import train
result = train("glyphs-ce", "runs/letters")  # a preset, or a Config
"""

from retrieval import lazy_attribute

TYPE_CHECKING = False
if TYPE_CHECKING:
    from trainer.config import Config as Config
    from trainer.run.setup import load_embedder as load_embedder
    from trainer.run.train import train as train
    from trainer.run.watch import Watch as Watch

PUBLIC = {
    "Config": "trainer.config",
    "Watch": "trainer.run.watch",
    "load_embedder": "trainer.run.setup",
    "train": "trainer.run.train",
}
__all__ = list(PUBLIC)


def __getattr__(name: str) -> object:
    return lazy_attribute(__name__, PUBLIC, name)
