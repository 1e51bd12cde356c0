"""Pipeline parallelism (paper, Section IV-B): stages of layers, schedules as data, and what runs, simulates and draws them."""
