"""The algorithms: pure functions on flat tensors, registered by name. Nothing here knows about ranks or engines."""
