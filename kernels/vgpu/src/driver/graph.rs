//! Graphs: work that was captured, to be done again. Nodes run in the order in which they were captured, which keeps
//! every dependency.
#![allow(non_snake_case)]

use std::ffi::{c_int, c_uint, c_void};

use super::work::{Kernel, Work, parameters};
use super::{Code, Handle, INVALID_HANDLE, INVALID_VALUE, api, put, state};

/// A piece of work in a graph.
#[derive(Clone)]
pub struct Node {
    pub handle: usize,
    pub work: Work,
}

/// `CUDA_KERNEL_NODE_PARAMS_v2`; of version 1 everything up to `extra`.
#[repr(C)]
pub struct KernelNodeParams {
    function: Handle,
    grid: [c_uint; 3],
    block: [c_uint; 3],
    dynamic: c_uint,
    params: *mut *mut c_void,
    extra: *mut *mut c_void,
}

fn instantiate(to: *mut Handle, graph: Handle) -> Result<(), Code> {
    let mut state = state();
    let nodes = state.graphs.get(&(graph as usize)).ok_or(INVALID_HANDLE)?.clone();
    let handle = state.handle();
    state.executables.insert(handle, nodes);
    // SAFETY: the caller's promise.
    unsafe { put(to, handle as Handle) }
}

fn set_kernel(executable: Handle, node: Handle, params: *const KernelNodeParams) -> Result<(), Code> {
    if params.is_null() {
        return Err(INVALID_VALUE);
    }
    // SAFETY: the caller's promise.
    let given = unsafe { &*params };
    let function = super::module::function(given.function)?;
    // SAFETY: the caller's promise.
    let bytes = unsafe { parameters(&function, given.params, given.extra)? };
    let kernel = Kernel { function, grid: given.grid, block: given.block, dynamic: given.dynamic, params: bytes };
    super::work::check(&Work::Kernel(kernel.clone()))?;
    let mut state = state();
    let nodes = state.executables.get_mut(&(executable as usize)).ok_or(INVALID_HANDLE)?;
    let found = nodes.iter_mut().find(|other| other.handle == node as usize).ok_or(INVALID_VALUE)?;
    match &mut found.work {
        Work::Kernel(old) => {
            *old = kernel;
            Ok(())
        }
        _ => Err(INVALID_VALUE),
    }
}

/// Takes over a graph of the same shape: the same kinds of work in the same order, and the same kernels.
fn update(executable: Handle, graph: Handle) -> Result<bool, Code> {
    let mut state = state();
    let nodes = state.graphs.get(&(graph as usize)).ok_or(INVALID_HANDLE)?.clone();
    let old = state.executables.get_mut(&(executable as usize)).ok_or(INVALID_HANDLE)?;
    let same = old.len() == nodes.len()
        && old.iter().zip(&nodes).all(|(a, b)| std::mem::discriminant(&a.work) == std::mem::discriminant(&b.work));
    if same {
        for (old, new) in old.iter_mut().zip(nodes) {
            old.work = new.work;
        }
    }
    Ok(same)
}

api! {
    fn cuGraphInstantiateWithFlags(to: *mut Handle, graph: Handle, _flags: u64) needs Context {
        instantiate(to, graph)
    }
    fn cuGraphInstantiate_v2(to: *mut Handle, graph: Handle, _node: *mut Handle, _log: *mut u8, _bytes: usize) needs Context {
        instantiate(to, graph)
    }
    fn cuGraphLaunch(executable: Handle, stream: Handle) needs Context {
        super::stream::check(stream)?;
        let nodes = {
            let mut state = state();
            if state.capture_of(stream)?.is_some() {
                return Err(super::NOT_SUPPORTED);
            }
            state.executables.get(&(executable as usize)).ok_or(INVALID_HANDLE)?.clone()
        };
        // Addresses were checked when they were captured; what was freed since is found now.
        for node in &nodes {
            super::work::check(&node.work)?;
            super::work::begin(node.work.clone())?;
        }
        Ok(())
    }
    fn cuGraphUpload(executable: Handle, stream: Handle) needs Context {
        super::stream::check(stream)?;
        state().executables.get(&(executable as usize)).map(|_| ()).ok_or(INVALID_HANDLE)
    }
    fn cuGraphDestroy(graph: Handle) needs Context {
        state().graphs.remove(&(graph as usize)).map(|_| ()).ok_or(INVALID_HANDLE)
    }
    fn cuGraphExecDestroy(executable: Handle) needs Context {
        state().executables.remove(&(executable as usize)).map(|_| ()).ok_or(INVALID_HANDLE)
    }
    fn cuGraphGetNodes(graph: Handle, to: *mut Handle, count: *mut usize) needs Context {
        let state = state();
        let nodes = state.graphs.get(&(graph as usize)).ok_or(INVALID_HANDLE)?;
        if count.is_null() {
            return Err(INVALID_VALUE);
        }
        // SAFETY: the caller's promise: room for `count` nodes, if there is any.
        unsafe {
            if to.is_null() {
                count.write(nodes.len());
                return Ok(());
            }
            let room = count.read();
            for at in 0..room {
                to.add(at).write(nodes.get(at).map_or(std::ptr::null_mut(), |node| node.handle as Handle));
            }
            count.write(room.min(nodes.len()));
        }
        Ok(())
    }
    fn cuGraphNodeGetType(node: Handle, kind: *mut c_int) needs Context {
        let state = state();
        let found = state.graphs.values().flatten().find(|other| other.handle == node as usize).ok_or(INVALID_VALUE)?;
        // CU_GRAPH_NODE_TYPE: kernel 0, memcpy 1, memset 2, empty 5.
        let number = match found.work {
            Work::Kernel(_) => 0,
            Work::Copy(_) => 1,
            Work::Fill { .. } => 2,
            Work::Nothing => 5,
        };
        // SAFETY: the caller's promise.
        unsafe { put(kind, number) }
    }
    fn cuGraphExecKernelNodeSetParams(executable: Handle, node: Handle, params: *const KernelNodeParams) needs Context {
        set_kernel(executable, node, params)
    }
    fn cuGraphExecKernelNodeSetParams_v2(executable: Handle, node: Handle, params: *const KernelNodeParams) needs Context {
        set_kernel(executable, node, params)
    }
    fn cuGraphExecUpdate(executable: Handle, graph: Handle, error_node: *mut Handle, result: *mut c_int) needs Context {
        let same = update(executable, graph)?;
        // SAFETY: the caller's promise.
        unsafe {
            put(error_node, std::ptr::null_mut())?;
            put(result, c_int::from(!same))?;
        }
        if same { Ok(()) } else { Err(910) }
    }
    fn cuGraphExecUpdate_v2(executable: Handle, graph: Handle, result: *mut c_int) needs Context {
        let same = update(executable, graph)?;
        // SAFETY: the caller's promise; the first word of the result is its kind.
        unsafe { put(result, c_int::from(!same))? };
        if same { Ok(()) } else { Err(910) }
    }
}
