"""
The `.tflite` file: its graph, its op-dtype map, its borders and the kernels that run it.

Nothing in here imports pytest or torch.
"""
