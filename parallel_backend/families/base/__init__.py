"""The records that describe a family of models to the backend: data, and short functions of a configuration."""
