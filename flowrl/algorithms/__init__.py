"""One file a method; each reads like its paper. They know rollouts and points, and nothing of models or training."""
