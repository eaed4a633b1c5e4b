"""How each leaf is split over ranks, and what lies together: plain data, used everywhere."""

from fzero.layout.layout import Home, Layout, LeafLayout, Together, plan_layout, uneven_bytes

__all__ = ["Home", "Layout", "LeafLayout", "Together", "plan_layout", "uneven_bytes"]
