"""Other libraries' interfaces, over the Engine: scripts written for them run by one import."""
