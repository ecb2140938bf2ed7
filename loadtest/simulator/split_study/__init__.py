"""Is one elastic pool as good as the best fixed choice? Over workloads, loads and targets, in the simulator."""
