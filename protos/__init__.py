"""The wire contract `kvmanager.proto` and the code generated from it (`make protos`)."""
