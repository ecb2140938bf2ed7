"""The router: client APIs (edge), admission queue, placement, dispatch, the view of the fleet."""
