"""Settings under which rounding grows: two correct runs then part by more than the tolerances allow.

A tolerance is set for trainings that damp rounding, as nanoGPT's recipes do. These settings amplify it, in
every framework and on one device as well: a small error beside them may be no mistake of an engine.
"""

from compare.spec.experiment import Experiment

NARROW = 4
SMALL_EPS, SMALL_NORM_EPS, SMALL_BETA2, LARGE_LR = 1e-10, 1e-8, 0.5, 0.1


def ill_conditioned(experiment: Experiment) -> str:
    """The settings that amplify rounding, each with the reason, in a clause; empty if there are none."""
    model, optimizer = experiment.model, experiment.optimizer
    reasons = []
    if optimizer.name == "adamw" and optimizer.eps < SMALL_EPS:
        reasons.append(
            f"optimizer.eps = {optimizer.eps:g} makes of a gradient that is rounding an update like any other"
        )
    if optimizer.name == "adamw" and optimizer.beta2 < SMALL_BETA2:
        reasons.append(
            f"optimizer.beta2 = {optimizer.beta2:g} divides each gradient by its own size: of it the sign is "
            f"left, which may be rounding"
        )
    if optimizer.learning_rate >= LARGE_LR:
        reasons.append(
            f"optimizer.learning_rate = {optimizer.learning_rate:g} overshoots, and rounding with it"
        )
    if model.n_embd < NARROW:
        reasons.append(f"model.n_embd = {model.n_embd} leaves LayerNorm a variance that may vanish")
    if model.norm_eps < SMALL_NORM_EPS:
        reasons.append(f"model.norm_eps = {model.norm_eps:g} lets LayerNorm divide by a vanishing variance")
    return "; ".join(reasons)
