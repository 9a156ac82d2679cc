"""Training that loses nothing: a recipe, a run, checkpoints that survive."""
