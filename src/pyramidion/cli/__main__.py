"""Run the command line as a module: python -m pyramidion.cli, as torchrun does."""

from pyramidion.cli import main

main()
