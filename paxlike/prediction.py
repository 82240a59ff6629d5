"""What a compiled program would take on a target: timeline, prediction, and collectives.

The one call that modes make: compile mode for one program, plan and compare mode for several.
"""

import dataclasses
from typing import Any

from meshes.targets import Target
from paxlike.analysis import collectives, hlo, timeline
from paxlike.analysis.collectives import Collective
from paxlike.analysis.cost import Kernels
from paxlike.analysis.cost_model import DEFAULT, CostModel
from paxlike.analysis.network import Network
from paxlike.report import Breakdown, Predicted


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prediction:
    """A predicted step.

    Attributes:
        predicted: the report's section.
        timeline: the simulated step it comes from.
        collectives: rows with their hidden fraction, the largest senders first.
    """

    predicted: Predicted
    timeline: timeline.Timeline
    collectives: tuple[Collective, ...]


def predict(
    program: hlo.Module | str,
    mesh: Any,
    target: Target | None,
    *,
    model_flops: float,
    kernels: Kernels | None = None,
    model: CostModel = DEFAULT,
) -> Prediction:
    """Predict a step from its compiled schedule.

    Args:
        program: optimised, scheduled HLO, as text or parsed.
        mesh: that it was compiled for; axis names and sizes do where devices stand in the target's
            order.
        target: the hardware; None, and CPU targets, are timed with round figures.
        model_flops: that the model needs for the step on all devices, for the MFU.
        kernels: cost of custom calls, as `cost.operations` takes it.
        model: constants of the cost model.

    Raises:
        ValueError: mesh, target and program have different numbers of devices.
    """
    module = hlo.parse(program) if isinstance(program, str) else program
    network = Network.of(mesh, target, model)
    simulated = timeline.simulate(module, network, kernels)
    rows = collectives.table(module, mesh, simulated.hidden)
    basis = model.basis
    if network.hardware.kind == "cpu":
        basis += f"; {network.hardware.title}"
    peak = network.hardware.bf16_flops * network.places[..., 0].size
    seconds = simulated.step_seconds
    predicted = Predicted(
        step_seconds=seconds,
        exposed_communication_seconds=simulated.exposed_communication_seconds,
        mfu=model_flops / (peak * seconds) if seconds else 0.0,
        bound_by=simulated.bound_by,
        basis=basis,
        breakdown=Breakdown(
            by_scope_seconds=simulated.by_scope(),
            by_class_seconds=simulated.by_class(),
            by_limit_seconds=simulated.limits(),
            exposed_by_axis_seconds=simulated.exposed_by_axis(),
            exposed_by_scope_seconds=simulated.exposed_by_scope(),
            hidden_communication_seconds=simulated.hidden_communication_seconds,
            idle_seconds=0.0,
        ),
    )
    ordered = tuple(sorted(rows, key=lambda row: -row.bytes_per_device))
    return Prediction(predicted=predicted, timeline=simulated, collectives=ordered)
