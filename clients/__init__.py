"""The thin side: engine and worker clients, and the two small GLM-5.3 engines that use only those."""
