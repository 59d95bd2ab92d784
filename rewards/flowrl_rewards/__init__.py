"""Built-in rewards, found through the entry points of the group `flowrl.rewards`, like anybody's."""
