"""`python -m vocabshard` is the `vocabshard` command."""

from vocabshard.command import main

if __name__ == "__main__":
    raise SystemExit(main())
