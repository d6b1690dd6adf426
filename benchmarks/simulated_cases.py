"""The cases of simulated_ranks.py: their recipes, what `unspool plan` chooses and predicts, and the comparison."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from cases import LLAMA_8B, SMALL_SHAPE, SMALL_UNIT, Case, write_model_files
from train_columns import STAGE_STEPS, write_case

from unspool.planning.cost import GIB, Links, Sent, sent
from unspool.planning.fit import Case as PlanInputs
from unspool.planning.fit import Estimate, estimate
from unspool.planning.footprint import PARTS
from unspool.planning.make_plan import plan
from unspool.planning.origins import plain_links
from unspool.planning.recipe_plan import Plan
from unspool.planning.step_time import ATTENTION, BACKWARD, exposed_seconds

LLAMA_70B = {
    "vocab_size": 128_256,
    "hidden_size": 8192,
    "intermediate_size": 28_672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
}
GPUS = (8, 64, 512)
PLANNED_BATCH = 4 << 20  # tokens of the step for which `plan` chooses the layout, as in ProLong
HOST = "1T"  # of a machine of eight GPUs
SETTINGS = {"optimizer": {"weights": "fp32", "states": "8bit"}, "compile": True, "lr": 2e-5}
SMALL_HEADS = {"num_attention_heads": 16, "num_key_value_heads": 8}
# Which field of `Sent` a collective belongs to. Sums of single numbers are too small to count.
SENT_BY = {
    "weights": ("all-gather", "reduce-scatter"),
    "copies": (),
    "heads": ("all-to-all",),
    "keys": ("send",),
}


@dataclass(frozen=True, kw_only=True)
class Simulation:
    shape: Mapping[str, Any]
    length: int
    world: int
    settings: Mapping[str, Any] = field(default_factory=lambda: SETTINGS)
    # With --small, where every layout fits, so that `plan` would choose none.
    small_layout: Mapping[str, int] = field(default_factory=dict)

    def case(self, *, rows: int, small: bool, **settings: Any) -> Case:
        found = Case(
            shape=dict(self.shape), length=self.length, rows_per_step=rows, settings={**self.settings, **settings}
        )
        if not small:
            return found
        return replace(
            found,
            shape=found.shape | SMALL_SHAPE | SMALL_HEADS,
            length=self.length // 1024 * SMALL_UNIT,
            settings=found.settings | {"compile": False},
            small=True,
        )


def _eight(length: int, world: int, **small_layout: int) -> Simulation:
    return Simulation(shape=LLAMA_8B, length=length << 10, world=world, small_layout=small_layout)


def _seventy(world: int, **small_layout: int) -> Simulation:
    # When these were measured, the trainer compiled full weights only, and those of 70B do not fit one GPU.
    settings = SETTINGS | {"compile": False}
    return Simulation(shape=LLAMA_70B, length=64 << 10, world=world, settings=settings, small_layout=small_layout)


# Most important first.
SIMULATIONS = {
    "8b-64k-8": _eight(64, 8, ulysses=4),
    "70b-64k-64": _seventy(64, ulysses=8),
    "8b-512k-512": _eight(512, 512, ulysses=8, ring=8),
    "8b-64k-512": _eight(64, 512, ulysses=8),
    "8b-128k-64": _eight(128, 64, ulysses=8),
    "70b-64k-8": _seventy(8, ulysses=8),
    "8b-256k-512": _eight(256, 512, ulysses=16),
    "70b-64k-512": _seventy(512, ulysses=8),
    "8b-64k-64": _eight(64, 64, ulysses=4),
    "8b-256k-64": _eight(256, 64, ring=4),
    "8b-128k-8": _eight(128, 8, ulysses=8),
    "8b-128k-512": _eight(128, 512, ulysses=16),
    "8b-512k-64": _eight(512, 64, ulysses=8),
    "8b-256k-8": _eight(256, 8),
    "8b-512k-8": _eight(512, 8, ulysses=4),
}
# Minutes per step; only by name.
LONG = ("8b-512k-64", "8b-256k-8", "8b-512k-8")


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What `plan` says of one micro-batch per rank, in the layout that it chose for a whole batch."""

    simulation: Simulation
    recipe: Path  # of the micro-batch
    planned: Plan  # of a whole batch
    chosen: Estimate
    estimate: Estimate  # of the micro-batch
    compute_seconds: float  # of the micro-batch, if links were infinitely fast

    @property
    def sent_bytes(self) -> Sent:
        stage = self.estimate.stage
        recomputed = stage.activation_checkpointing != "none"
        return sent(self.planned.model.shape, self.estimate.layout, stage.context_length, recomputed=recomputed)

    def step_seconds(self, compute: float, bytes_sent: Sent) -> float:
        """Seconds of a step that computes `compute` seconds and sends these bytes over the stated links."""
        forward, backward, _ = ATTENTION[256]
        share = BACKWARD / backward / (1 / forward + BACKWARD / backward)
        return compute + exposed_seconds(
            bytes_sent,
            self.estimate.layout,
            self.estimate.machine.speed.links,
            computing=compute,
            backward_attention=share * self.estimate.seconds.attention,
        )

    def as_plain(self) -> dict[str, Any]:
        own, world = self.estimate, self.simulation.world
        stage, held = own.stage, own.footprint
        memory = {name: value for name, value in asdict(stage.memory).items() if value not in (None, False, 0)}
        return {
            "ranks": world,
            "length": stage.context_length,
            "layers": self.planned.model.shape.num_layers,
            "layout": asdict(own.layout),
            "settings": memory | {"compile": stage.compile},
            "links": plain_links(self.planned.machine),
            "flops_per_token": self.planned.stages[0].flops_per_token,
            "plan": {
                "peak_gib": round(held.device / GIB, 2),
                "moment": held.moment,
                "parts_gib": {part: round(getattr(held, part) / GIB, 2) for part in PARTS},
                "compute_seconds": round(self.compute_seconds, 4),
                "step_seconds": round(own.seconds.step, 4),
                "sent_bytes": {name: round(value) for name, value in asdict(self.sent_bytes).items()},
            },
            "plan_of_batch": {
                "batch_tokens": self.chosen.stage.batch_tokens,
                "peak_gib": round(self.chosen.device_bytes / GIB, 2),
                "step_seconds": round(self.chosen.seconds.step, 3),
                "tokens_per_second_per_gpu": round(self.chosen.tokens_per_second / world, 1),
            },
        }


def plan_of(simulation: Simulation, folder: Path, *, small: bool = False) -> Plan:
    """Let `plan` choose layout and memory settings for a step of PLANNED_BATCH tokens."""
    rows = simulation.world if small else max(1, PLANNED_BATCH // simulation.length)
    layout = {"parallel": dict(simulation.small_layout)} if small else {}
    case = simulation.case(rows=rows, small=small, **layout)
    write_model_files(case, folder / "model")
    return plan(write_case(case, folder), gpu="h200", count=simulation.world, host_mem=HOST)


def predict(
    simulation: Simulation, folder: Path, *, small: bool, link: float | None = None, network: float | None = None
) -> Prediction:
    """Predict one micro-batch per rank in the layout and with the memory settings that `plan` chooses."""
    planned = plan_of(simulation, folder, small=small)
    if link is not None or network is not None:
        planned = planned.on_links(inside=link, between=network)
    [stage] = planned.stages
    if stage.chosen is None:
        raise SystemExit(f"{folder.name}: plan finds no settings that fit ({stage.problem}).")
    chosen = stage.chosen.stage
    tokens = stage.chosen.layout.data_ranks * chosen.context_length
    own = chosen.model_copy(update={"batch_tokens": tokens, "tokens": STAGE_STEPS * tokens})
    keys = {"parallel", "optimizer", *vars(chosen.memory)}
    settings = chosen.model_dump(mode="json", include=keys)
    recipe = write_case(
        simulation.case(rows=stage.chosen.layout.data_ranks, small=small, **settings), folder / "micro-batch"
    )
    machine = planned.machine
    inputs = PlanInputs(
        loaded=planned.loaded,
        values=planned.model.values,
        shape=planned.model.shape,
        docs=planned.data.documents[chosen.name],
        speed=machine.speed,
        machine=machine,
    )
    unlimited = replace(machine.speed, links=Links(inside=math.inf, between=math.inf))
    return Prediction(
        simulation=simulation,
        recipe=recipe,
        planned=planned,
        chosen=stage.chosen,
        estimate=estimate(inputs, own),
        compute_seconds=estimate(replace(inputs, speed=unlimited), own).seconds.step,
    )


def compare(prediction: Prediction, rank: Mapping[str, Any]) -> dict[str, Any]:
    """Compare with a simulated rank: its memory, its compute, its bytes, and the step that follows from them."""
    counted = counted_bytes(rank["collectives"])
    compute = sorted(rank["step_seconds"])[len(rank["step_seconds"]) // 2]
    step = prediction.step_seconds(compute, counted)
    tokens = prediction.estimate.stage.batch_tokens / prediction.simulation.world
    flops = tokens * prediction.planned.stages[0].flops_per_token
    peak = prediction.estimate.machine.gpu.tflops * 1e12
    wanted = asdict(prediction.sent_bytes)
    ratios = {
        "compute": prediction.compute_seconds / compute,
        "step": prediction.estimate.seconds.step / step,
        **{f"{name}_bytes": wanted[name] / value for name, value in asdict(counted).items() if value},
    }
    if rank["memory_gib"]:
        ratios["memory"] = prediction.estimate.device_bytes / GIB / rank["memory_gib"]
    return {
        "counted_bytes": asdict(counted),
        "compute_seconds": compute,
        "step_seconds": round(step, 4),
        "tokens_per_second_per_gpu": round(tokens / step, 1),
        "mfu": round(flops / step / peak, 4),
        "predicted_to_measured": {name: round(value, 4) for name, value in ratios.items()},
    }


def counted_bytes(collectives: list[dict[str, Any]]) -> Sent:
    totals = {
        name: float(sum(one["bytes"] for one in collectives if one["kind"] in kinds)) for name, kinds in SENT_BY.items()
    }
    return Sent(**totals)
