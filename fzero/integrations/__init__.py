"""Other people's training loops on an Engine, each in a module that imports its library."""
