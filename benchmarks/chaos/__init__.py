"""What is promised of a bad day, each promise with an experiment that tries to break it: `make chaos`.

An experiment is a module of this package that is named in `experiments`, with

- `PROMISE`, what is promised, in a sentence or two,
- `run(minutes)`, which does it to real servers and returns `outcome.Figure`s, of which those with a bound are promised.
  `minutes` is how long an experiment that goes on for a time does so; others do what they do and end.
"""
