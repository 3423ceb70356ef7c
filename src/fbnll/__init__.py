"""Personalised federated learning with noisy labels: clustering of users and correction of labels from the spectra of their features.

>>> from fbnll.spectral import similarity_matrix
>>> from fbnll.clustering import hac
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["Experiment", "__version__", "run"]

if TYPE_CHECKING:
    from fbnll.experiment import Experiment
    from fbnll.runner import run


def __getattr__(name: str) -> Any:
    """Imports what a name needs when it is used, so that the numerics can be had without the rest."""
    if name == "Experiment":
        from fbnll.experiment import Experiment

        return Experiment
    if name == "run":
        from fbnll.runner import run

        return run
    raise AttributeError(f"module 'fbnll' has no attribute {name!r}")
