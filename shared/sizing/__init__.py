"""How much hardware a load needs: arithmetic over shapes. `tandem fit`, the planner and the simulator use it."""
