"""Scripts are run by tests, and not imported: DeepSpeed need not be installed."""

collect_ignore_glob = ["scripts/*"]
