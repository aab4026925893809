"""Language models: the protocol the engine calls, and the models that come with the project."""
