//! Events: points of a stream, and the time they were reached.
#![allow(non_snake_case)]

use std::ffi::{c_int, c_uint};
use std::time::Instant;

use super::{Code, Handle, INVALID_HANDLE, NOT_READY, State, api, put, state};

/// An event; how it was last recorded.
pub struct Event {
    timed: bool,
    reached: Option<Instant>,
    /// The capture in which it was recorded.
    pub capture: Option<usize>,
    /// Work that was submitted before it.
    behind: u64,
}

impl State {
    pub fn event(&mut self, event: Handle) -> Result<&mut Event, Code> {
        self.events.get_mut(&(event as usize)).ok_or(INVALID_HANDLE)
    }
}

fn record(event: Handle, stream: Handle) -> Result<(), Code> {
    super::stream::check(stream)?;
    let _device = super::device();
    let mut state = state();
    let capture = state.capture_of(stream)?;
    let behind = state.submitted;
    let event = state.event(event)?;
    (event.capture, event.behind) = (capture, behind);
    if capture.is_none() {
        event.reached = Some(Instant::now());
    }
    Ok(())
}

fn elapsed(from: Handle, to: Handle) -> Result<f32, Code> {
    let mut state = state();
    let mut when = |event| {
        let event = state.event(event)?;
        if !event.timed {
            return Err(INVALID_HANDLE);
        }
        event.reached.ok_or(INVALID_HANDLE)
    };
    let (from, to) = (when(from)?, when(to)?);
    let forward = to.saturating_duration_since(from).as_secs_f32();
    Ok((forward - from.saturating_duration_since(to).as_secs_f32()) * 1e3)
}

api! {
    fn cuEventCreate(event: *mut Handle, flags: c_uint) needs Context {
        let mut state = state();
        let handle = state.handle();
        // CU_EVENT_DISABLE_TIMING is 2.
        state.events.insert(handle, Event { timed: flags & 2 == 0, reached: None, capture: None, behind: 0 });
        // SAFETY: the caller's promise.
        unsafe { put(event, handle as Handle) }
    }
    fn cuEventDestroy_v2(event: Handle) needs Context {
        state().events.remove(&(event as usize)).map(|_| ()).ok_or(INVALID_HANDLE)
    }
    fn cuEventRecord(event: Handle, stream: Handle) needs Context {
        record(event, stream)
    }
    fn cuEventRecordWithFlags(event: Handle, stream: Handle, _flags: c_uint) needs Context {
        record(event, stream)
    }
    fn cuEventSynchronize(event: Handle) needs Context {
        let behind = {
            let mut state = state();
            let event = state.event(event)?;
            if event.capture.is_some() {
                return Err(super::CAPTURE_UNSUPPORTED);
            }
            event.behind
        };
        super::work::finish_until(behind)
    }
    fn cuEventQuery(event: Handle) needs Context {
        let mut state = state();
        let event = state.event(event)?;
        let (captured, behind) = (event.capture.is_some(), event.behind);
        if captured || behind > state.done { Err(NOT_READY) } else { Ok(()) }
    }
    fn cuEventElapsedTime(milliseconds: *mut f32, from: Handle, to: Handle) needs Context {
        // SAFETY: the caller's promise.
        unsafe { put(milliseconds, elapsed(from, to)?) }
    }
    fn cuEventElapsedTime_v2(milliseconds: *mut f32, from: Handle, to: Handle) needs Context {
        // SAFETY: the caller's promise.
        unsafe { put(milliseconds, elapsed(from, to)?) }
    }
    fn cuStreamWaitEvent(stream: Handle, event: Handle, _flags: c_uint) needs Context {
        super::stream::check(stream)?;
        let mut state = state();
        let capture = state.event(event)?.capture;
        match capture {
            // A stream that waits for a point of a capture takes part in it.
            Some(capture) if state.captures.contains_key(&capture) => state.join(stream, capture),
            _ => Ok(()),
        }
    }
    fn cuStreamQuery(stream: Handle) needs Context {
        super::stream::check(stream)?;
        let mut state = state();
        match state.capture_of(stream)? {
            Some(_) => Err(super::CAPTURE_UNSUPPORTED),
            None if state.queue.is_empty() => Ok(()),
            None => Err(NOT_READY),
        }
    }
    fn cuLaunchHostFunc(stream: Handle, function: Option<unsafe extern "C" fn(Handle)>, data: Handle) needs Context {
        super::stream::check(stream)?;
        let Some(function) = function else { return Err(super::INVALID_VALUE) };
        if state().capture_of(stream)?.is_some() {
            return Err(super::NOT_SUPPORTED);
        }
        super::work::finish()?;
        let _device = super::device();
        // SAFETY: the caller's promise: the function may be called with this data.
        unsafe { function(data) };
        Ok(())
    }
    fn cuStreamAddCallback(_stream: Handle, _function: Handle, _data: Handle, _flags: c_int) needs Context {
        Err(super::NOT_SUPPORTED)
    }
}
