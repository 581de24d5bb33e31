"""What the heartbeat of a real rank has after a step."""

from __future__ import annotations

from typing import Any

from tests import parity, world
from titanmoe.watch.heartbeat import LoggedMessage
from titanmoe.watch.watch import Watch

CHANGES = {"parallelism.tp": 2, "parallelism.experts.ep": 4, "data.source": "synthetic"}
CHANGES |= {"training.global_batch_size": 4}


def step(changes: dict[str, Any]) -> tuple[list[LoggedMessage], int, list[str]]:
    """Its messages, microbatches and layers, and the norms that are still changed afterwards."""
    trainer = parity.make_trainer(parity.TINY | CHANGES | changes)
    watch = Watch(trainer)
    with watch.listener.on(trainer.parts, trainer.clock):
        trainer.train_step()
    (part,) = trainer.parts
    left = [name for name, module in part.named_modules() if "forward" in vars(module)]
    return watch.heart.messages(), trainer.loader.microbatches, left


def test_every_message_of_a_step_has_its_microbatch_layer_and_direction() -> None:
    for mode in ("none", "full"):
        results = world.run(4, step, {"activation_checkpoint.mode": mode})
        messages, microbatches, left = results[0]
        assert left == [] and len(messages) > 40
        assert [message.total for message in messages] == list(range(1, len(messages) + 1))
        alike = [[one._replace(bytes=0) if one.op == "all-to-all" else one for one in found] for found, *_ in results]
        assert alike[0] == alike[1] == alike[2] == alike[3]
        rows = [one.step_position for one in messages if one.op == "all-to-all"]
        where = list(dict.fromkeys(rows))
        layers = sorted({layer for _, layer, _ in where})
        assert layers == list(range(len(layers))) and len(layers) > 1
        for m in range(microbatches):
            forward = [(m, layer, False) for layer in layers]
            assert [one for one in where if one[0] == m] == forward + [(m, layer, True) for layer in layers[::-1]]
