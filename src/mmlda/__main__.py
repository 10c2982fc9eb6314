"""`python -m mmlda`, which is how torchrun starts it."""

from mmlda.cli import main

main()
