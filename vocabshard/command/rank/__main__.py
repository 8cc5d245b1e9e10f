"""What `vocabshard score` runs on every rank that it starts."""

from vocabshard.command import main

if __name__ == "__main__":
    raise SystemExit(main())
