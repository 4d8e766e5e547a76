//! Streams, and capturing what is submitted to them.
#![allow(non_snake_case)]

use std::ffi::{c_int, c_uint};

use super::graph::Node;
use super::{
    CAPTURE_IMPLICIT, CAPTURE_INVALIDATED, CAPTURE_UNMATCHED, CAPTURE_UNSUPPORTED, Code, Handle, INVALID_HANDLE,
    INVALID_VALUE, State, api, put, state,
};

/// A stream that was created.
#[derive(Default)]
pub struct Stream {
    /// The capture that it takes part in.
    pub capture: Option<usize>,
    flags: c_uint,
    priority: c_int,
}

/// What is being captured.
pub struct Capture {
    /// The stream in which it began, and the thread.
    origin: usize,
    thread: std::thread::ThreadId,
    /// 0 global, 1 of the thread, 2 relaxed: which other calls make it fail.
    mode: c_int,
    pub nodes: Vec<Node>,
    invalid: bool,
}

/// Whether this is one of the streams that always are (null, legacy, per thread).
fn special(stream: Handle) -> bool {
    stream as usize <= 2
}

/// Whether there is such a stream.
pub fn check(stream: Handle) -> Result<(), Code> {
    if special(stream) || state().streams.contains_key(&(stream as usize)) { Ok(()) } else { Err(INVALID_HANDLE) }
}

/// Calls that wait for the device, or that make it wait, invalidate captures that do not allow them.
pub fn outside_of_captures() -> Result<(), Code> {
    let thread = std::thread::current().id();
    let mut state = state();
    let mut failed = Ok(());
    for capture in state.captures.values_mut() {
        if capture.mode == 0 || capture.mode == 1 && capture.thread == thread {
            capture.invalid = true;
            failed = Err(CAPTURE_UNSUPPORTED);
        }
    }
    failed
}

impl State {
    /// The capture of a stream; an error if the stream has become useless by it.
    pub fn capture_of(&mut self, stream: Handle) -> Result<Option<usize>, Code> {
        if special(stream) {
            // Work of the legacy stream waits for all others, which a capture cannot hold.
            let blocking = self.streams.values().any(|stream| stream.capture.is_some() && stream.flags & 1 == 0);
            return if blocking { Err(CAPTURE_IMPLICIT) } else { Ok(None) };
        }
        let Some(capture) = self.streams.get(&(stream as usize)).ok_or(INVALID_HANDLE)?.capture else {
            return Ok(None);
        };
        match self.captures.get(&capture) {
            Some(found) if found.invalid => Err(CAPTURE_INVALIDATED),
            _ => Ok(Some(capture)),
        }
    }

    /// A stream takes part in a capture from now on.
    pub fn join(&mut self, stream: Handle, capture: usize) -> Result<(), Code> {
        let stream = self.streams.get_mut(&(stream as usize)).ok_or(CAPTURE_IMPLICIT)?;
        match stream.capture {
            Some(other) if other != capture => Err(905),
            _ => {
                stream.capture = Some(capture);
                Ok(())
            }
        }
    }
}

fn create(to: *mut Handle, flags: c_uint, priority: c_int) -> Result<(), Code> {
    if flags > 1 {
        return Err(INVALID_VALUE);
    }
    let mut state = state();
    let handle = state.handle();
    state.streams.insert(handle, Stream { capture: None, flags, priority });
    // SAFETY: the caller's promise.
    unsafe { put(to, handle as Handle) }
}

api! {
    fn cuStreamCreate(to: *mut Handle, flags: c_uint) needs Context {
        create(to, flags, 0)
    }
    fn cuStreamCreateWithPriority(to: *mut Handle, flags: c_uint, priority: c_int) needs Context {
        create(to, flags, priority)
    }
    fn cuStreamDestroy_v2(stream: Handle) needs Context {
        state().streams.remove(&(stream as usize)).map(|_| ()).ok_or(INVALID_HANDLE)
    }
    fn cuStreamSynchronize(stream: Handle) needs Context {
        check(stream)?;
        let mut state = state();
        if let Some(capture) = state.capture_of(stream)? {
            if let Some(capture) = state.captures.get_mut(&capture) {
                capture.invalid = true;
            }
            return Err(CAPTURE_UNSUPPORTED);
        }
        drop(state);
        super::work::finish()
    }
    fn cuStreamGetFlags(stream: Handle, flags: *mut c_uint) needs Context {
        check(stream)?;
        // SAFETY: the caller's promise.
        unsafe { put(flags, state().streams.get(&(stream as usize)).map_or(0, |stream| stream.flags)) }
    }
    fn cuStreamGetPriority(stream: Handle, priority: *mut c_int) needs Context {
        check(stream)?;
        // SAFETY: the caller's promise.
        unsafe { put(priority, state().streams.get(&(stream as usize)).map_or(0, |stream| stream.priority)) }
    }
    fn cuStreamAttachMemAsync(stream: Handle, _at: u64, _bytes: usize, _flags: c_uint) needs Context {
        check(stream)
    }
    fn cuStreamBeginCapture_v2(stream: Handle, mode: c_int) needs Context {
        check(stream)?;
        if special(stream) {
            return Err(CAPTURE_UNSUPPORTED);
        }
        if !(0..=2).contains(&mode) {
            return Err(INVALID_VALUE);
        }
        let mut state = state();
        if state.capture_of(stream)?.is_some() {
            return Err(CAPTURE_UNSUPPORTED);
        }
        let handle = state.handle();
        let capture = Capture {
            origin: stream as usize,
            thread: std::thread::current().id(),
            mode,
            nodes: Vec::new(),
            invalid: false,
        };
        state.captures.insert(handle, capture);
        state.join(stream, handle)
    }
    fn cuStreamEndCapture(stream: Handle, graph: *mut Handle) needs Context {
        check(stream)?;
        let mut state = state();
        let number = state.streams.get(&(stream as usize)).and_then(|stream| stream.capture).ok_or(INVALID_VALUE)?;
        let capture = state.captures.remove(&number).ok_or(INVALID_VALUE)?;
        for stream in state.streams.values_mut().filter(|stream| stream.capture == Some(number)) {
            stream.capture = None;
        }
        if capture.origin != stream as usize {
            return Err(CAPTURE_UNMATCHED);
        }
        if capture.invalid {
            return Err(CAPTURE_INVALIDATED);
        }
        let handle = state.handle();
        state.graphs.insert(handle, capture.nodes);
        // SAFETY: the caller's promise.
        unsafe { put(graph, handle as Handle) }
    }
    fn cuStreamIsCapturing(stream: Handle, status: *mut c_int) needs Context {
        check(stream)?;
        let state = state();
        let capture = state.streams.get(&(stream as usize)).and_then(|stream| stream.capture);
        let invalid = capture.and_then(|capture| state.captures.get(&capture)).map(|capture| capture.invalid);
        // SAFETY: the caller's promise.
        unsafe { put(status, invalid.map_or(0, |invalid| 1 + c_int::from(invalid))) }
    }
    fn cuThreadExchangeStreamCaptureMode(mode: *mut c_int) needs Nothing {
        // SAFETY: the caller's promise.
        unsafe { put(mode, 0) }
    }
}
