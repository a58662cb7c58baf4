"""All that runs on a rank: the worker that takes messages, the engine, and the model, attention and transfers below it."""
