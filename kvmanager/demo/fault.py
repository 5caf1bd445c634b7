"""One corrupted byte, so placed that a correct comparison must see it.

The byte is the exponent of a latent row's scale, in a row that the next decode step reads: layer 0
of the model is computed here, from the prompt alone, to find such a row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from kvmanager.clients.glm.codec import GROUP_VALUES, LATENT_VALUES
from kvmanager.clients.glm.model import Glm
from kvmanager.clients.glm.page_table import PageTable
from kvmanager.clients.glm.store import ContiguousStore
from kvmanager.clients.tables import NO_PAGE, decode_spans, order_runs
from kvmanager.clients.worker import ClassMemory
from kvmanager.layout import Section
from kvmanager.protos import kvmanager_pb2 as pb

EXPONENT_BIT: Final = 0x40
"""Highest exponent bit of a little-endian float32's last byte: the scale changes by a factor of 2**128."""
SCALES: Final = LATENT_VALUES // GROUP_VALUES
BLOWN_UP: Final = 1e6
"""A hidden state this far from the right one can't give the right token except by chance."""
_LAYER: Final = 0


@dataclass(frozen=True)
class Fault:
    """A byte of a row of layer 0: the position's row, and the byte in it."""

    position: int
    row_byte: int


def candidate_faults(model: Glm, prompt: Tensor, token: int) -> Iterator[Fault]:
    """Faults that the decode step of `token` after `prompt` int64[L] can't miss."""
    length = len(prompt)
    positions = torch.arange(length + 1)
    hidden = model.embed(torch.cat((prompt, torch.tensor([token]))))
    store = ContiguousStore(model.config.format, model.codec)
    rows = model.layer_rows(_LAYER, hidden, positions)
    model.write_rows(_LAYER, positions, rows, store)
    query, place = hidden[-1:], positions[-1:]
    keys = model.index_keys(_LAYER, length + 1, store)
    selection = model.select(_LAYER, query, place, keys)
    right = model.attend(_LAYER, query, place, model.gather(_LAYER, selection, store))
    for position in selection[0].tolist():
        for scale in range(SCALES if 0 <= position < length else 0):
            fault = Fault(position, LATENT_VALUES + 4 * scale + 3)
            at = torch.tensor([position])
            spoiled = rows.latent[position : position + 1].clone()
            spoiled[0, fault.row_byte] ^= EXPONENT_BIT
            store.write_latent(_LAYER, at, spoiled)
            wrong = model.attend(_LAYER, query, place, model.gather(_LAYER, selection, store))
            store.write_latent(_LAYER, at, rows.latent[position : position + 1])
            if float((wrong - right).abs().max()) > BLOWN_UP:
                yield fault


def inject_fault(model: Glm, prompt: Tensor, token: int, opened: pb.OpenReply, latent: ClassMemory) -> str | None:
    """Flips one bit in the mapped memory of a decode rank that holds [0, L) of `prompt`; says where.

    Only a row that arrived in host memory will do: the step can't read it anywhere else. None, and nothing
    is flipped, when the next step reads no such row.
    """
    component = latent.layout.by_key[(Section.LATENT, _LAYER)]
    table = _page_table(opened, latent.layout.page_rows)
    for fault in candidate_faults(model, prompt, token):
        (ordinal,), (slot,) = table.resolve(np.array([fault.position]))
        page = int(table.host[ordinal])
        if latent.host is None or page == NO_PAGE or table.device[ordinal] != NO_PAGE:
            continue
        offset = component.offset + page * component.page_stride + int(slot) * component.slot_stride
        latent.host[offset + fault.row_byte] ^= EXPONENT_BIT
        return f"byte {fault.row_byte} of the row of position {fault.position}, layer {_LAYER}, host page {page}"
    return None


def _page_table(opened: pb.OpenReply, page_rows: int) -> PageTable:
    """Where the request's latent rows lie."""
    table = PageTable(page_rows)
    for spans in map(decode_spans, opened.spans):
        column = spans.pages["latent"]
        for part in order_runs(spans, ranks=1):
            pages = (spans.uids[part.pages], column.device[part.pages], column.host[part.pages])
            table.append(part.order, part.first_token, *pages, spans.pages["indexer"].device[part.pages])
    return table
