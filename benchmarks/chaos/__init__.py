"""What is promised for a bad day, each promise with an experiment that tries to break it: `make chaos`.

An experiment is a module of this package that is named in `experiments`, with

- `PROMISE`: what is promised, in a sentence or two;
- `run(minutes)`, which runs the experiment on real servers and returns `outcome.Figure`s; those with a bound are
  promised. `minutes` is how long an experiment lasts, if it has no end of its own.
"""
