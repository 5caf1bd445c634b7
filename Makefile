.PHONY: protos
protos:
	PATH="$(CURDIR)/.venv/bin:$$PATH" .venv/bin/python -m grpc_tools.protoc -I protos --python_out=protos --grpc_python_out=protos --mypy_out=protos protos/kvmanager.proto
	sed -i 's/^import kvmanager_pb2 as/from kvmanager.protos import kvmanager_pb2 as/' protos/kvmanager_pb2_grpc.py
