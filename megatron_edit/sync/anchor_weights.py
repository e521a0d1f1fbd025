"""The model computes with the weights that all replicas agree on, for an evaluation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from megatron_edit.sync.engine import SyncEngine
from megatron_edit.sync.modules import ModuleShard


@contextmanager
def anchor_weights(engine: SyncEngine) -> Iterator[None]:
    """The anchor inside; afterwards the local parameters are back, bit for bit. A due sync is completed first.

    In warm-up and `baseline` the current parameters are used; by a method that keeps no anchor, the plain mean of the
    replicas' parameters. Collective over the world.
    """
    engine.drain()
    for chunk in engine.chunks:
        chunk.disable_forward_pre_hook(param_sync=True)
    differ = not engine.trigger.in_warmup
    local = [[piece.model.clone() for piece in module.slices] for module in engine.modules if differ]
    if differ:
        for module in engine.modules:
            _write_model(module, module.views(engine.agreed_parameters(module)))
            engine.release(module)
        _gather_parameters(engine)
    try:
        yield
    finally:
        for module, pieces in zip(engine.modules, local, strict=False):
            _write_model(module, pieces)
        if differ:
            _gather_parameters(engine)
        for chunk in engine.chunks:
            chunk.enable_forward_pre_hook()


def _write_model(module: ModuleShard, pieces: Sequence[torch.Tensor]) -> None:
    for piece, value in zip(module.slices, pieces, strict=True):
        piece.model.data.copy_(value)


def _gather_parameters(engine: SyncEngine) -> None:
    for chunk in engine.chunks:
        chunk.start_param_sync(force_sync=True)
