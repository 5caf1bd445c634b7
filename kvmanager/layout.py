"""Layouts as data: where each component of a token's KV lies inside a region.

A **format** says what one token's KV consists of (components and their row bytes). A **layout**
says where the rows lie. Two layouts of one format can always be copied into one another
(`kvmanager.core.plans`); nothing is ever inferred from tensor shapes.

The address of a row is `offset + page * page_stride + slot * slot_stride` within the region.
All byte counts are Python or 64-bit integers: page 613 of the GLM-5.3 layout is the first that
crosses 2**31 bytes.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from typing import Final

from kvmanager.errors import InvalidArgument

LATENT_ROW_BYTES: Final = 656
"""fp8_ds_mla row: 512 e4m3 values, 4 float32 scales (one per 128 values), 64 bfloat16 rope values."""
LATENT_BF16_ROW_BYTES: Final = 1_152
"""bf16 row: 512 latent and 64 rope values, two bytes each."""
INDEX_VALUE_BYTES: Final = 128
"""Indexer key: 128 e4m3 values."""
INDEX_SCALE_BYTES: Final = 4
"""Indexer key's float32 scale."""


class Section(StrEnum):
    """The kinds of row a token has."""

    LATENT = "latent"
    KEY_VALUE = "key_value"
    INDEX_VALUE = "index_value"
    INDEX_SCALE = "index_scale"


@dataclass(frozen=True, slots=True)
class KVFormat:
    """What one token's KV consists of.

    `share_groups`: layers (MTP included, last) that share one top-k, leader first. In a plain format (no indexer
    rows) each is one row: row `layer * heads + head` of the token, in layers of `heads` heads.
    """

    name: str
    share_groups: tuple[tuple[int, ...], ...]
    latent_row_bytes: int = LATENT_ROW_BYTES
    index_value_bytes: int = INDEX_VALUE_BYTES
    index_scale_bytes: int = INDEX_SCALE_BYTES

    @property
    def layers(self) -> int:
        """Layers with a latent row, MTP included."""
        return sum(len(group) for group in self.share_groups)

    @property
    def leaders(self) -> tuple[int, ...]:
        """Layers with an indexer row."""
        return tuple(group[0] for group in self.share_groups)

    @property
    def fingerprint(self) -> str:
        """Hex sha256 over all that decides a token's bytes; the name stands for the codec of the rows."""
        parts = [self.latent_row_bytes, self.index_value_bytes, self.index_scale_bytes]
        text = json.dumps(["kvformat/1", self.name, self.share_groups, parts], separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def token_bytes(self) -> int:
        """Bytes of one token over all layers."""
        index = self.index_value_bytes + self.index_scale_bytes
        return self.layers * self.latent_row_bytes + len(self.share_groups) * index

    def latent_page_bytes(self, page_rows: int) -> int:
        """Latent rows of all layers for one page of tokens."""
        return page_rows * self.layers * self.latent_row_bytes

    def indexer_page_bytes(self, page_rows: int) -> int:
        """Indexer rows of all leaders for one page of tokens."""
        return page_rows * len(self.share_groups) * (self.index_value_bytes + self.index_scale_bytes)

    def page_bytes(self, page_rows: int) -> int:
        """A whole page: latent and indexer sections."""
        return self.latent_page_bytes(page_rows) + self.indexer_page_bytes(page_rows)

    def slab_bytes(self, page_rows: int) -> int:
        """The HBM slab of a decode rank: the least whole number of indexer pages that holds a latent page."""
        indexer = self.indexer_page_bytes(page_rows)
        return -(-self.latent_page_bytes(page_rows) // indexer) * indexer


def glm_share_groups(layers: int, freq: int = 4, offset: int = 3) -> tuple[tuple[int, ...], ...]:
    """Share groups of a GLM-5 model with `layers` main layers, its MTP layer appended as its own group.

    Layer i leads when `max(i - offset + 1, 0) % freq == 0`.
    """
    groups: list[list[int]] = []
    for layer in range(layers):
        if max(layer - offset + 1, 0) % freq == 0:
            groups.append([layer])
        else:
            groups[-1].append(layer)
    return (*(tuple(group) for group in groups), (layers,))


GLM53: Final = KVFormat("glm-5.3-fp8_ds_mla", glm_share_groups(78))
GLM53_BF16: Final = KVFormat("glm-5.3-bf16", glm_share_groups(78), latent_row_bytes=LATENT_BF16_ROW_BYTES)
"""Latents as bfloat16; the indexer's rows are fp8 all the same. No copy plan leads from one format to another."""
GLM53_TINY: Final = KVFormat("glm-5.3-tiny-fp8_ds_mla", glm_share_groups(6))
FORMATS: Final = {format_.name: format_ for format_ in (GLM53, GLM53_BF16, GLM53_TINY)}


def plain_format(dtype: str, layers: int, heads: int, row_bytes: int) -> KVFormat:
    """The format of a model without an indexer: `heads` rows of `row_bytes` a token and layer, of element type `dtype`.

    Its name says it all: `kv/float16/32x8x512`. Raises InvalidArgument for counts below 1.
    """
    if min(layers, heads, row_bytes) < 1 or not dtype:
        raise InvalidArgument(f"a plain format of {layers} layers, {heads} heads, {row_bytes} B rows: all at least 1")
    rows = tuple((row,) for row in range(layers * heads))
    return KVFormat(f"kv/{dtype}/{layers}x{heads}x{row_bytes}", rows, row_bytes, 0, 0)


def workspace_format(form: KVFormat) -> KVFormat:
    """What lies in a rank's workspace: of each token one layer's latent row and indexer key, with its scale."""
    row_bytes = form.latent_row_bytes + form.index_value_bytes + form.index_scale_bytes
    return plain_format("uint8", 1, 1, row_bytes)


def workspace_group(group: str, rank: int) -> str:
    """The group of kind "engine" that is the workspace of a rank of `group`."""
    return f"{group}-workspace-{rank}"


_PLAIN: Final = re.compile(r"kv/([a-z0-9_]{1,32})/([1-9]\d{0,4})x([1-9]\d{0,4})x([1-9]\d{0,6})")


def format_named(name: str) -> KVFormat:
    """A known format, or a plain one by what its name says. Raises InvalidArgument."""
    if name in FORMATS:
        return FORMATS[name]
    plain = _PLAIN.fullmatch(name)
    if plain is None:
        raise InvalidArgument(
            f"no format {name!r}; use one of {', '.join(FORMATS)}, or kv/DTYPE/LAYERSxHEADSxROW_BYTES, for example "
            "kv/bfloat16/32x8x512"
        )
    return plain_format(plain[1], int(plain[2]), int(plain[3]), int(plain[4]))


@dataclass(frozen=True, slots=True)
class Component:
    """Rows of one section of one layer: where they lie and how long they are (all in bytes)."""

    section: Section
    layer: int
    offset: int
    page_stride: int
    slot_stride: int
    row_bytes: int


@dataclass(frozen=True)
class KVLayout:
    """Where the components of a token lie in a region of pages of `page_rows` slots."""

    name: str
    page_rows: int
    components: tuple[Component, ...]

    @cached_property
    def by_key(self) -> dict[tuple[Section, int], Component]:
        """Components by (section, layer)."""
        table = {(c.section, c.layer): c for c in self.components}
        if len(table) != len(self.components):
            raise InvalidArgument(f"layout {self.name} describes a component twice")
        return table

    @cached_property
    def page_bytes(self) -> int:
        """Bytes from one page to the next, when all components agree; refuses layer-outermost layouts."""
        strides = {c.page_stride for c in self.components}
        if len(strides) != 1:
            raise InvalidArgument(f"layout {self.name} has no single page: strides {sorted(strides)}")
        return strides.pop()

    @cached_property
    def fingerprint(self) -> str:
        """Hex sha256 over everything that decides where a byte lies."""
        rows = [
            [c.section.value, c.layer, c.offset, c.page_stride, c.slot_stride, c.row_bytes] for c in self.components
        ]
        text = json.dumps(["kvlayout/1", self.page_rows, sorted(rows)], separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()


def _latent_components(format_: KVFormat, page_rows: int, page_stride: int) -> list[Component]:
    """`[group][slot][layer of the group][row]`: the layers of a share group lie side by side."""
    components = []
    base = 0
    for group in format_.share_groups:
        group_row = len(group) * format_.latent_row_bytes
        for place, layer in enumerate(group):
            offset = base + place * format_.latent_row_bytes
            components.append(
                Component(Section.LATENT, layer, offset, page_stride, group_row, format_.latent_row_bytes)
            )
        base += page_rows * group_row
    return components


def _indexer_components(format_: KVFormat, page_rows: int, page_stride: int, base: int) -> list[Component]:
    """`[leader][slots x values | slots x scales]`, from `base` on."""
    components = []
    value, scale = format_.index_value_bytes, format_.index_scale_bytes
    for leader in format_.leaders:
        components.append(Component(Section.INDEX_VALUE, leader, base, page_stride, value, value))
        base += page_rows * value
        components.append(Component(Section.INDEX_SCALE, leader, base, page_stride, scale, scale))
        base += page_rows * scale
    return components


def native_layout(format_: KVFormat, page_rows: int) -> KVLayout:
    """One page holds all: latent section by share group, then the indexer section."""
    page_bytes = format_.page_bytes(page_rows)
    latent = _latent_components(format_, page_rows, page_bytes)
    indexer = _indexer_components(format_, page_rows, page_bytes, format_.latent_page_bytes(page_rows))
    return KVLayout(f"native/{format_.name}", page_rows, (*latent, *indexer))


def plain_layout(format_: KVFormat, page_rows: int) -> KVLayout:
    """`[layer][head][slot][row]` in one page: a block of an engine's tensors, layer after layer."""
    stride = format_.page_bytes(page_rows)
    rows = _latent_components(format_, page_rows, stride)
    components = (replace(component, section=Section.KEY_VALUE) for component in rows)
    return KVLayout(f"plain/{format_.name}", page_rows, tuple(components))


def latent_layout(format_: KVFormat, page_rows: int) -> KVLayout:
    """A decode rank's latent page (and hot-row slab): one page a slab."""
    slab = format_.slab_bytes(page_rows)
    return KVLayout(f"latent/{format_.name}", page_rows, tuple(_latent_components(format_, page_rows, slab)))


def indexer_layout(format_: KVFormat, page_rows: int) -> KVLayout:
    """A decode rank's indexer page; a slab holds a whole number of them."""
    stride = format_.indexer_page_bytes(page_rows)
    return KVLayout(f"indexer/{format_.name}", page_rows, tuple(_indexer_components(format_, page_rows, stride, 0)))


def layer_major_layout(format_: KVFormat, page_rows: int) -> KVLayout:
    """`[layer][slot][row]`, then the indexer section: what engines with FlashMLA kernels read."""
    page_bytes = format_.page_bytes(page_rows)
    row = format_.latent_row_bytes
    layers = [layer for group in format_.share_groups for layer in group]
    latent = [
        Component(Section.LATENT, layer, place * page_rows * row, page_bytes, row, row)
        for place, layer in enumerate(layers)
    ]
    indexer = _indexer_components(format_, page_rows, page_bytes, format_.latent_page_bytes(page_rows))
    return KVLayout(f"layer-major/{format_.name}", page_rows, (*latent, *indexer))


def layer_outermost_layout(format_: KVFormat, page_rows: int, pages: int) -> KVLayout:
    """`[component][page][slot][row]`: one tensor a component over `pages` pages."""
    components = []
    base = 0
    for c in native_layout(format_, page_rows).components:
        stride = page_rows * c.row_bytes
        components.append(Component(c.section, c.layer, base, stride, c.row_bytes, c.row_bytes))
        base += pages * stride
    return KVLayout(f"layer-outermost/{format_.name}", page_rows, tuple(components))
