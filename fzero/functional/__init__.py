"""User code made pure: modules, rematerialisation, torch's checkpoints."""
