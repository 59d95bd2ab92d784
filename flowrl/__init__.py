"""RL post-training of flow-matching models. Importing it is light: the data types are in `flowrl.types`."""

__version__ = "0.1.0"
