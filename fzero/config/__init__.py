"""What a user sets, checked at once."""

from fzero.config.config import Config, as_config

__all__ = ["Config", "as_config"]
