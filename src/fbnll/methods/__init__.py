"""The methods by name: `METHODS` is the only registry, and a method is imported when it is used."""

import importlib
import inspect
from collections.abc import Callable, Iterator

from fbnll.federation import Round

METHODS = {
    "fb_nll": "fbnll.methods.fb_nll:fb_nll",
    "fb_nll_minus": "fbnll.methods.fb_nll:fb_nll_minus",
    "fedavg": "fbnll.methods.fedavg:fedavg",
    "ifca_pfl": "fbnll.methods.ifca:ifca_pfl",
    "oracle": "fbnll.methods.oracle:oracle",
    "clean": "fbnll.methods.oracle:clean",
    "local": "fbnll.methods.local:local",
    "reference_only": "fbnll.methods.reference_only:reference_only",
}

LABELS = {
    "fb_nll": "FB-NLL",
    "fb_nll_minus": "FB-NLL(-)",
    "fedavg": "one global model",
    "ifca_pfl": "IFCA-PFL",
    "oracle": "true tasks",
    "clean": "true tasks, clean labels",
    "local": "each user alone",
    "reference_only": "the clean set alone",
}

Method = Callable[..., Iterator[Round]]


def load_method(name: str) -> Method:
    if name not in METHODS:
        raise ValueError(f"method must be one of {', '.join(METHODS)}, but it is {name!r}")
    module, _, function = METHODS[name].partition(":")
    method: Method = getattr(importlib.import_module(module), function)
    return method


def settings_of(method: Method) -> set[str]:
    """The settings that a method names in its signature, and clustered FedAvg's where it passes settings on."""
    from fbnll.methods.fedavg import clustered_fedavg

    parameters = inspect.signature(method).parameters.values()
    passed_on = settings_of(clustered_fedavg) if any(p.kind is p.VAR_KEYWORD for p in parameters) else set()
    return {p.name for p in parameters if p.kind is p.KEYWORD_ONLY} | passed_on
