"""Front door and brain: the client APIs (edge), admission queue, placement, dispatch, the view of the fleet."""
