"""Layouts: how the blocks of a ring lie in the sequence. One file each, in one registry."""

from longspan.core.layouts.base import LAYOUTS, RingLayout, Span, register_layout
from longspan.core.layouts.contiguous import Contiguous
from longspan.core.layouts.zigzag import Zigzag

__all__ = ["LAYOUTS", "Contiguous", "RingLayout", "Span", "Zigzag", "register_layout"]

register_layout(Contiguous())
register_layout(Zigzag())
