"""How much hardware a load needs: arithmetic over shapes, no engine. `tandem fit`, the planner and the simulator use it."""
