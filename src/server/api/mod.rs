//! What a path means.

use std::sync::Arc;

use super::{ApiError, Call, Reply, State};

/// Answers a request.
pub async fn route(_state: Arc<State>, call: Call) -> Reply {
    let message = format!("{} {}: there is no such endpoint", call.method, call.path);
    ApiError::new(404, "not_found_error", message).into()
}
