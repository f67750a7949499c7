"""The private names of torch on which zeroamp stands. Only files of this folder use them.

`tests/hooks/_torch/test_private_names.py` fails for a name of this folder that is not listed here, and for one that is
listed and not used any more. Checked on torch 2.11.0, 2.13.0 and 2.15.0.
"""

REASONS = {
    # Modules
    "_fsdp_common": "`FSDPMeshInfo`, which says over which ranks a group is reduced, is not exported",
    "_fully_shard": "the package of FSDP2's modules",
    "_functional_collectives": "`AsyncCollectiveTensor`: what DTensor's redistribution returns in traced runs",
    "_python_dispatch": "`TorchDispatchMode` is documented, but exported nowhere else",
    "_subclasses": "`FakeTensorMode` is exported nowhere else",
    # FSDP2: state of a module and its parameter groups
    "_get_fsdp_state": "the one door to a module's parameter groups; setters are public, no getter is",
    "_fsdp_param_group": "the group of a module, up to torch 2.11",
    "_fsdp_param_groups": "the groups of a module, from torch 2.12 on",
    "_reduce_dtype": "the dtype of unsharded sums can only be set before the first forward by public names",
    "_unsharded_param": "a run in other dtypes needs another unsharded parameter, which FSDP2 makes if it has none",
    "_to_sharded": "`reshard` retains a group in whose forward an exception was raised",
    "_partial_reduce_output": "sums that await their replicas; an abandoned optimizer step must discard them",
    "_register_post_backward_hook": "a unit that runs several times is reduced once: no public switch",
    "_training_state": "by which FSDP2 knows whether a group's backward has ended",
    "_pre_forward": "the hook that unshards; a group holder, which is never called, runs it with its unit",
    "_post_forward": "the hook that reshards; see `_pre_forward`",
    "_pre_backward": "unshards before the backward; FSDP2 hooks only what a forward returns, and loses hooks on views",
    "_comm_ctx": "the record of forwards, by which a backward prefetches; one without gradients must leave it",
    "_post_forward_indices": "a group's places in that record",
    "_root_post_backward_final_callback": "waits for the last reductions; no hook runs around it",
    "_timeout": "the timeout of a process group; new groups do not inherit it",
    "_get_backend": "see `_timeout`",
    "_composable_state": "the module of the next name",
    "_module_state_mapping": "a module that was unwrapped could not be sharded again: FSDP2 finds its old state there",
    # FSDP2: all-gathers of a plain shard in another dtype
    "_init_extensions": "FSDP2 looks for an extension once, before it is set here",
    "_sharded_local_tensor": "the property from which FSDP2 takes an extension; else the shard must be of its class",
    "_sharded_param_data": "the shard as it is all-gathered, with padding",
    # DTensor
    "_local_tensor": "`to_local` takes as long as a kernel launch, and is called for each parameter of each step",
    # Dispatcher, autograd, profiler
    "_C": "the module with the next four names",
    "_current_graph_task_id": "whether a backward runs in this thread, and which",
    "_current_autograd_node": "whether FSDP2 ends a group within a backward, or at its end",
    "_will_engine_execute_node": "whether a backward sets `grad` of a leaf, before it does",
    "_set_throw_on_mutable_data_ptr": "the address of a fake tensor is 0, to which a kernel of Triton would write",
    "_execution_engine": "queues a callback for the end of a backward",
    "_base": "whether a tensor is a view, as autocast asks before it caches a cast",
    "_disable_dynamo": "`torch.compiler.disable` imports torch._dynamo when it decorates, 2 s before any training",
    "_grouped_mm": "the op of `F.grouped_mm`, which fake tensors lack",
    "_unsafe_view": "the op of `reshape`, whose schema declares no view",
    "_is_profiler_enabled": "`record_function` takes microseconds also when nothing records",
    "_foreach_norm": "one launch for all tensors",
    # Files
    "_create_file_view": "`torch.load` reads one of the tensors of a file; a copy of its bytes takes 7 % of a load",
    # Meshes
    "_get_root_mesh": "the mesh of which a mesh is a slice",
    "_flatten": "one axis of several",
    "_concatenate": "one mesh of several slices",
}
"""Name, or part of a module's name -> why no public one serves."""
