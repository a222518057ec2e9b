"""Analyses of a model in one call: each runs in batches and returns a table that plots itself.

Examples:
    >>> effects = fh.analysis.activation_patching(
    ...     model, clean, corrupted, metric, "model.layers.*"
    ... )
    >>> effects.plot()
"""

# Each analysis reads tensors at places of the model (`targets.py`), in hooks of a separate scope,
# which ends with the call. Sweeps change one cell after the other: they repeat the inputs, one copy
# of the rows for each cell (`sweeps.py`). An unchanged copy among them shows that rows are
# independent. The metric gets the output of each copy (`calls.py`), as in a loop by hand.

from ferrohook.analysis.ablating import ablation as ablation
from ferrohook.analysis.activity import ActiveFeatures as ActiveFeatures
from ferrohook.analysis.activity import FeatureActivity as FeatureActivity
from ferrohook.analysis.activity import active_features as active_features
from ferrohook.analysis.direct import direct_logit_attribution as direct_logit_attribution
from ferrohook.analysis.direct_effects import DirectEffects as DirectEffects
from ferrohook.analysis.direct_effects import FeatureEffect as FeatureEffect
from ferrohook.analysis.direct_effects import direct_effects as direct_effects
from ferrohook.analysis.effects import Effects as Effects
from ferrohook.analysis.lens import Lens as Lens
from ferrohook.analysis.lens import logit_lens as logit_lens
from ferrohook.analysis.patching import activation_patching as activation_patching
from ferrohook.analysis.patching import attribution_patching as attribution_patching
from ferrohook.analysis.thresholds import ThresholdTable as ThresholdTable
from ferrohook.analysis.thresholds import threshold as threshold

__all__ = [
    "ActiveFeatures",
    "DirectEffects",
    "Effects",
    "FeatureActivity",
    "FeatureEffect",
    "Lens",
    "ThresholdTable",
    "ablation",
    "activation_patching",
    "active_features",
    "attribution_patching",
    "direct_effects",
    "direct_logit_attribution",
    "logit_lens",
    "threshold",
]


def __dir__() -> list[str]:
    return __all__
