"""Score summaries: ROUGE with intervals, paired differences, repetition, and the baselines that any model must beat."""

from pyramidion.evaluation.baselines import lead, lexrank
from pyramidion.evaluation.overlap import rouge, script_warning
from pyramidion.evaluation.resampling import bootstrap, paired_bootstrap
from pyramidion.evaluation.splitting import sentences
from pyramidion.evaluation.wording import repetition

__all__ = ["bootstrap", "lead", "lexrank", "paired_bootstrap", "repetition", "rouge", "script_warning", "sentences"]
