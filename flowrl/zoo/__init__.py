"""The embedded world: scenes with exact metadata, their verifier, and the models that ship with the package."""
